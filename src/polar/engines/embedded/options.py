"""`[engine.options]` of the embedded engine, and the options of `polar engine`."""

from typing import Literal

from pydantic import Field

from polar.config import Port, SettingsSection


class EmbeddedOptions(SettingsSection):
    device: str = Field("auto", description="cpu, cuda, cuda:1, ... [auto: a GPU where there is one]")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights and cache [auto: float32 on a CPU, bfloat16 on a GPU]"
    )
    threads: int | None = Field(None, gt=0, description="of the CPU [default: torch's own choice]")
    context_length: int | None = Field(
        None, gt=1, description="tokens of prompt and reply together [default: 2048, or the model's, if that is less]"
    )
    memory_gib: float | None = Field(
        None, gt=0, description="of keys and values: room for so many contexts [default: 2 on a CPU, 8 on a GPU]"
    )
    max_requests: int = Field(256, gt=0, description="that are sampled at the same time, at most; others wait")
    max_batch_tokens: int | None = Field(
        None, gt=0, description="in one pass of the model [default: 1024 on a CPU, 4096 on a GPU]"
    )
    host: str = "127.0.0.1"
    port: Port = Field(0, description="0 takes a free one")
    state: str | None = Field(
        None, description="file that remembers the last update of the weights, for a restart [default: none is kept]"
    )
