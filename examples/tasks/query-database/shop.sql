create table customers (id integer primary key, name text not null);
create table orders (id integer primary key, customer integer references customers, paid integer, cancelled integer);
create table items (orders integer references orders, article text, quantity integer, cents integer);
insert into customers values (1, 'Brandt'), (2, 'Adeyemi'), (3, 'Costa'), (4, 'Dahl'), (5, 'Evans');
insert into orders values (10, 1, 1, 0), (11, 1, 1, 0), (12, 2, 1, 0), (13, 3, 0, 0), (14, 4, 1, 1), (15, 4, 1, 0);
insert into orders values (16, 5, 1, 0), (17, 5, 1, 0), (18, 5, 0, 0);
insert into items values (10, 'lamp', 1, 4500), (10, 'bulb', 4, 250), (11, 'desk', 1, 12000), (12, 'desk', 1, 12000);
insert into items values (12, 'lamp', 1, 4500), (12, 'bulb', 4, 250), (13, 'sofa', 1, 59900), (14, 'sofa', 2, 59900);
insert into items values (15, 'bulb', 10, 250), (16, 'chair', 6, 3900), (17, 'bulb', 2, 250), (18, 'desk', 1, 12000);
