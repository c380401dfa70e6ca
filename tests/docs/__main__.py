"""python -m tests.docs: how many blocks of README.md and docs/ are run, and why the others are not."""

from collections import Counter

from tests.docs.blocks import list_pages, read_blocks


def main() -> None:
    blocks = [block for page in list_pages() for block in read_blocks(page)]
    for block in blocks:
        if not block.kind and not block.excerpt_of:
            print(f"{block}: {block.reason or 'NEITHER RUN NOR MARKED'}")
    counts = Counter(block.accounted for block in blocks)
    kinds = Counter(block.kind for block in blocks if block.kind)
    run = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    print(
        f"{len(blocks)} blocks: {counts['run']} run or read by Polar ({run}), "
        f"{counts['excerpt']} excerpts of files, {counts['marked']} marked, {counts['neither']} neither"
    )


if __name__ == "__main__":
    main()
