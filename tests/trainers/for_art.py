"""To be imported before ART, which is installed apart from the others: what it asks for can't be met beside them."""

import sys
from pathlib import Path

import absent

absent.packages("litellm", "polars", "art.transformers")  # the last one patches another transformers than ours
sys.path.append(str(Path(sys.prefix).parent / "apart"))
