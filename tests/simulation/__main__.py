"""One schedule with all that happens in it, or many of them.

python -m tests.simulation SEED
python -m tests.simulation FIRST COUNT
"""

import sys
import time

from tests.simulation.world import Broken, problems, simulate


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:]]
    if len(numbers) == 1:
        try:
            seconds = simulate(numbers[0], say=print)
        except Broken as error:
            print(error)
            return 1
        print(f"seed {numbers[0]}: all is well after {seconds:.0f} s")
        return 0
    first, count = numbers
    began, found = time.process_time(), 0
    for problem in problems(first, count):
        print(problem, flush=True)
        found += 1
    seconds = time.process_time() - began
    print(f"{count} schedules in {seconds:.1f} s of CPU ({count / seconds * 60:.0f} a minute), {found} with problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
