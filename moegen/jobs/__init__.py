"""Files of requests: JSON lines in, JSON lines out.

Input: see :mod:`moegen.graph.requests`.

Output, one line a request, in the order of the input::

    {"id": "a", "text": " Paris.", "prompt_tokens": 5, "completion_tokens": 3,
     "finish_reason": "stop"}
    {"id": "b", "error": "..."}

A request that is well formed but cannot be served (an empty prompt, or one that does not fit the
context) becomes an error line, and the others run. ``finish_reason`` is ``"stop"`` at the end of
the text and ``"length"`` at ``max_tokens``.

While a job runs, its lines are in ``OUTPUT.partial``, in the order in which they finished, below a
first line that identifies the job. When all are there they are put in order under the name
``OUTPUT``: a file of that name is always complete. A job that was cut short leaves its ``.partial``
to be read if it holds an answer, else none; started again it begins anew, and the earlier answers
lie in ``OUTPUT.partial.old`` until it ends. An ``OUTPUT``, or a ``.partial`` of another job or of a
process that is still writing it, is never overwritten.
"""

from __future__ import annotations

from moegen.jobs.encoded import Job, Unservable, encode
from moegen.jobs.output import Output, Row, require_writable
from moegen.jobs.pace import Pace
from moegen.jobs.report import Report
from moegen.jobs.run import Summary, engine_class, enough_memory, run_job

__all__ = [
    "Job",
    "Output",
    "Pace",
    "Report",
    "Row",
    "Summary",
    "Unservable",
    "encode",
    "engine_class",
    "enough_memory",
    "require_writable",
    "run_job",
]
