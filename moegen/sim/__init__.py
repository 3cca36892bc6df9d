"""What a task graph would cost: cost models turn work into time, the engine adds a clock.

Adds simpy, pandas and scipy to what :mod:`moegen.graph` imports; never imports torch or
:mod:`moegen.exec`.
"""
