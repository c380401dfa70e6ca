"""Makes the pages of the documentation site: what `make docs` runs before mkdocs."""
