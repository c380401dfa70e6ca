"""Numbers that describe a list of numbers."""


def mean(values):
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)


def median(values):
    """The middle value; with an even number of values, the mean of the two in the middle."""
    if not values:
        raise ValueError("no values")
    return values[len(values) // 2]


def spread(values):
    """The largest value less the smallest."""
    if not values:
        raise ValueError("no values")
    return max(values) - values[0]
