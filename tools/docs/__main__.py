"""python -m tools.docs TARGET: writes all pages of the site into a folder, for mkdocs."""

import sys
from pathlib import Path

from tools.docs.pages import build_pages
from tools.docs.reference import build_reference

if __name__ == "__main__":
    build_pages(Path(__file__).parents[2], Path(sys.argv[1]), build_reference())
