"""The distribution that installs this package. Its name is not the package's: `polar` on PyPI is another project."""

DISTRIBUTION = "polar-rl"


def install_hint(extra: str) -> str:
    """The command that installs Polar with an extra, for errors about a package that is missing."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def installed_version() -> str:
    """From the distribution's metadata; 0+unknown where the package is imported without being installed."""
    from importlib.metadata import PackageNotFoundError, version  # it reads the file system; few callers need it

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"
