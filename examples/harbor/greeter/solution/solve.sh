#!/bin/sh
sed -i 's/^salutation=/greeting=/' /etc/greeter.conf
chmod +x /opt/greeter/greet
