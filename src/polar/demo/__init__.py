"""`polar demo`: a small model learns to use a tool, from nothing but rewards, in minutes on a laptop.

questions.py   questions whose answers stand in a book, and in no prompt
tasks.py       the same as tasks for an agent
preparing.py   the folder of a demo: its tasks, and train.toml
"""
