"""What must be so when all is done: every result is there and was seen, and what processes have in memory is true."""

from typing import TYPE_CHECKING, Any

from polar.rollout.queue.records import Counts, Totals

if TYPE_CHECKING:
    from tests.simulation.world import World


def undone(world: "World") -> str | None:
    """What is not yet as it must be in the end."""
    audit = world.audit
    for trainer in world.trainers.values():
        if trainer.process.dead:
            return "a trainer is dead"
        notes = trainer.notes
        mine = {task.request.task_id for task in world.schedule.tasks if task.request.run == trainer.run}
        if notes.accepted != mine:
            return f"tasks are not accepted: {mine - notes.accepted}"
        wanted = {task.request.task_id for task in world.schedule.tasks if task.cancel_at is not None} & mine
        if notes.cancelled != wanted:
            return f"tasks are not cancelled: {wanted - notes.cancelled}"
        if trainer.run == "default" and world.schedule.steers and not notes.steered:
            return "the trainer steers"
        if trainer.run in world.schedule.quotas and not notes.limited:
            return "the trainer changes its quotas"
        rows = [work for work in audit.work.values() if work.run == trainer.run]
        if not all(work.state == "done" for work in rows) or len({work.task_id for work in rows}) != len(mine):
            return f"work is not done: {[work for work in rows if work.state != 'done']}"
        done = [(work.task_id, work.sample) for work in sorted(rows, key=lambda work: work.cursor or 0)]
        if notes.seen != done:
            if notes.seen != done[: len(notes.seen)]:
                world.fail(f"A follower saw {notes.seen} of {done}.")
            return f"a follower saw {len(notes.seen)} of {len(done)} results"
        ended = sorted((task for task in audit.tasks.values() if task.run == trainer.run), key=_cursor)
        if notes.groups != [task.task_id for task in ended]:
            return f"a follower saw {notes.groups} of {ended}"
    return _unsettled(world)


def _unsettled(world: "World") -> str | None:
    """What of the processes' memory is not as the database has it."""
    for work in world.audit.work.values():
        if work.session_id is None or work.usable or work.session_id in world.disk.disowned:
            continue
        verdict = world.sessions[work.session_id].verdict
        if verdict is not None and verdict.reward is not None:
            return f"the store has a reward of {work}, which is of no use"
    server = world.address
    if server is None or server.process.dead or not server.ready:
        return "there is no server"
    if any(not one.process.dead for one in world.servers if one is not server):
        return "a server that was replaced is still there"
    rollout = server.rollout
    if any(counts != Counts() for counts in rollout.ledger.lanes.values()):
        return f"the ledger has {rollout.ledger.lanes}"
    totals = {run: rollout.ledger.totals[run] for run in world.schedule.runs}
    tasks = world.audit.tasks.values()
    for run, total in totals.items():
        mine = [task for task in tasks if task.run == run]
        found = Totals(len(mine), sum(task.ended for task in mine), sum(task.usable for task in mine))
        if total != found:
            return f"the ledger has {total} of {run}, and there is {found}"
        if run in world.schedule.quotas:
            if rollout.list_quotas().get(run) != world.schedule.quotas[run]:
                world.fail(f"The quotas of {run} are {rollout.list_quotas().get(run)}.")
            if world.schedule.quotas[run].max_ahead is not None and rollout.ledger.untaken[run]:
                return f"{rollout.ledger.untaken[run]} sessions of {run} seem to wait for the trainer"
    engines = rollout.engine_controller.engines
    steering = world.trainers["default"].notes
    if world.schedule.steers and engines.pools["default"].replicas[0].version < steering.version:
        world.fail(f"The version is {engines.pools['default']}, and {steering.version} was set.")
    if engines.pools["default"].paused is not None:
        world.fail("Generation stands still, and it was resumed.")
    members = rollout.lease_manager.members
    nodes = [machine.node for machine in world.machines if machine.node is not None and machine.alive]
    if len(nodes) != len(world.machines) or members.keys() != {node.node_id for node in nodes}:
        return f"the members are {list(members)}"
    for node in nodes:
        if members[node.node_id].leases or members[node.node_id].cancelled:
            return f"{node.node_id} has {members[node.node_id].leases} in the server's memory"
        if node.worker._held or node.worker._outbox or node.host.busy:
            return f"{node.node_id} still holds something"
        if node.engines != engines or members[node.node_id].applied_generation != engines.generation:
            return f"{node.node_id} has engines {node.engines}"
    return None


def _cursor(task: Any) -> int:
    return task.cursor or 0
