import unittest

from stats import mean, median, spread


class StatsTest(unittest.TestCase):
    def test_mean(self):
        assert mean([1, 2, 6]) == 3

    def test_median_of_an_odd_number(self):
        assert median([9, 1, 5]) == 5

    def test_median_of_an_even_number(self):
        assert median([4, 1, 3, 2]) == 2.5

    def test_values_stay_as_they_are(self):
        values = [3, 1, 2]
        median(values)
        assert values == [3, 1, 2]

    def test_spread(self):
        assert spread([4, 1, 8]) == 7

    def test_no_values(self):
        for function in (mean, median, spread):
            try:
                function([])
            except ValueError:
                continue
            self.fail(f"{function.__name__} of nothing is something")


if __name__ == "__main__":
    unittest.main()
