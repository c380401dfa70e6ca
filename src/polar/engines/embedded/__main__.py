"""`python -m polar.engines.embedded`: `polar engine`, for whoever starts it as a child."""

import sys

from polar.cli.main import main

if __name__ == "__main__":
    main(["engine", *sys.argv[1:]])
