"""The name until 0.2 of `polar.bridges.verl.trainer`, which launch scripts may have in VERL_USE_EXTERNAL_MODULES."""

from polar.bridges.verl import trainer

__all__ = ["trainer"]
