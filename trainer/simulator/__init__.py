"""A simulated training cluster of any size, with labelled faults. Loads no torch.

`simulation.simulate` makes a run of a `scenario.Scenario`. The simulator shares no code with the
analysis except the span contract, so that a correct diagnosis of its runs is evidence.
"""
