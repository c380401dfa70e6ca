"""`python -m polar.engines.scripted`: prints `listening on URL` and serves until it is told to stop."""

import asyncio
import sys
from pathlib import Path

import click

from polar.engines.api_server.server import make_stop_event
from polar.engines.scripted.play import Play, PlaySet
from polar.engines.scripted.server import TOKENIZER_FOLDER, ScriptedServer
from polar.errors import PolarError


@click.command(context_settings={"show_default": True})
@click.option("--play", "path", type=click.Path(path_type=Path), help="A TOML or JSON file with the turns.")
@click.option("--random", "random_seed", type=int, help="Play random turns of this seed instead.")
@click.option("--turns", default=4, help="With --random: how many turns.")
@click.option("--words", default=40, help="With --random: how many words a turn.")
@click.option("--host", default="127.0.0.1", help="Where it listens.")
@click.option("--port", default=0, help="0 takes a free one.")
@click.option("--model", default="scripted", help="The model's name.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    default=TOKENIZER_FOLDER,
    show_default=False,
    help="The folder of a tokenizer and its chat template [default: the one that comes with it].",
)
@click.option("--max-model-len", default=131072, help="Tokens of prompt and reply together.")
@click.option("--rate", default=0.0, help="Tokens a second for each stream; 0 for as fast as it goes.")
@click.option("--tokens-per-chunk", default=1, help="Tokens in each event of a stream.")
@click.option("--drift", default=0.1, help="The share of words that re-encode to other ids.")
@click.option("--seed", default=0, help="Chooses the words that drift.")
@click.option("--policy-version", "--version", "version", default=0, help="The version that the policy begins with.")
@click.option("--experts", default=0, help="A mixture of so many: replies to token ids say which were taken.")
def main(path: Path | None, random_seed: int | None, turns: int, words: int, **options: object) -> None:
    """An engine that plays a script and speaks vLLM's HTTP API."""
    try:
        if path is not None:
            play: Play | PlaySet | None = PlaySet.load(path)
        else:
            play = None if random_seed is None else Play.random(random_seed, turns, words)
        server = ScriptedServer(play, **options)  # type: ignore[arg-type]  # click has checked them
        if sys.platform == "win32":
            asyncio.run(_serve(server))
        else:
            import uvloop

            uvloop.run(_serve(server))
    except PolarError as error:
        raise click.ClickException(str(error)) from error


async def _serve(server: ScriptedServer) -> None:
    stop = make_stop_event()
    async with server:
        click.echo(f"listening on {server.url}")
        await stop.wait()


if __name__ == "__main__":
    main()
