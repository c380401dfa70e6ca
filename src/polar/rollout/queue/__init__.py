"""The queue of the rollout service: tasks, and their work, as rows of the store's database.

Queue (queue.py)       what is submitted, leased, ended and read; each method is one transaction
  selection.py         which work a node gets next; whether work killed the nodes that died under it
  records.py           tasks, work and what becomes of them, as records and rows
  QueueDatabase        transactions of the one server that may write; queue.sql has the statements
"""

from polar.rollout.queue.database import QueueDatabase, Superseded
from polar.rollout.queue.queue import Queue

__all__ = ["Queue", "QueueDatabase", "Superseded"]
