"""How far ahead of its lane a task is handed over, by the executor and in its simulation."""

from __future__ import annotations

from moegen.graph.task import Lane

#: Tasks of a lane that may have been handed over and not have ended; the CPU's queue has no end.
#: A driver's queue is not much longer (about a thousand entries, several a task), and launching
#: waits in it until there is room: meanwhile the thread could hand nothing over to lanes that idle.
#: Copies of weights have most entries each, and take so long that a few are enough.
MOST_AHEAD = {Lane.GPU: 64, Lane.BULK: 16, Lane.KV: 64, Lane.ACT: 64}
