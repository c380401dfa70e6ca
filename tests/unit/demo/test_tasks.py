from pathlib import Path

from polar import tasks as reading
from polar.demo import tasks
from polar.demo.questions import make_questions


def test_written_tasks_are_tasks_and_no_prompt_holds_an_answer(tmp_path: Path) -> None:
    asked = make_questions(train=6, held_out=4, seed=0)
    tasks.write_tasks(tmp_path, asked, hops=1)
    train = reading.read([tmp_path / "train.jsonl"])
    held_out = reading.read([tmp_path / "held-out.jsonl"])
    assert (len(train), len(held_out)) == (6, 4)
    assert len({task.task_id for task in train + held_out}) == 10
    for task, question in zip(train, asked.train, strict=True):
        assert task.evaluator is not None
        assert task.evaluator.config["expected"] == question.answer
        assert task.agent.custom_shell is not None
        assert question.answer not in task.instruction + task.agent.custom_shell.command.rpartition("agent.py")[2]


def test_tasks_for_another_harness_say_how_to_answer(tmp_path: Path) -> None:
    tasks.write_tasks(tmp_path, make_questions(train=1, held_out=1, seed=0), hops=1, harness="pi")
    (task,) = reading.read([tmp_path / "train.jsonl"])
    assert (task.agent.harness, task.agent.custom_shell) == ("pi", None)
    assert "book.txt" in task.instruction
    assert "answer.txt" in task.instruction


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    tasks.main([str(tmp_path / "new"), "--hops", "2", "--digits", "4", "--train", "3", "--held-out", "2"])
    train = reading.read([tmp_path / "new" / "train.jsonl"])
    assert len(train) == 3
    assert len(reading.read([tmp_path / "new" / "held-out.jsonl"])) == 2
    assert train[0].agent.custom_shell is not None
    assert "--lookups 2" in train[0].agent.custom_shell.command
