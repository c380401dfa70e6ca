"""python -m tools.docs.check_site SITE: fails where a page of the site loads something from elsewhere."""

import re
import sys
from pathlib import Path

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|audio|video)\b[^>]*?\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*?\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:@import\s+["']?|url\(["']?)((?:https?:)?//[^"')\s]+)"""
)


def find_external_resources(site: Path) -> list[str]:
    """`PAGE: ADDRESS` for everything that a page or a style sheet loads from another host."""
    return [
        f"{file.relative_to(site)}: {next(filter(None, found.groups()))}"
        for file in sorted(site.rglob("*"))
        if file.suffix in (".html", ".css")
        for found in _LOADED.finditer(file.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    external = find_external_resources(Path(sys.argv[1]))
    sys.exit("\n".join(["The site would load from elsewhere:", *external]) if external else None)
