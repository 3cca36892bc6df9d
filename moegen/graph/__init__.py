"""What is to be done: models, machines, jobs, strategies, and the task graph of a step.

Imports nothing heavier than networkx, numpy and PyYAML. Nothing here knows a duration, a
tensor or a device.
"""
