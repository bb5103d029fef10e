"""A synthetic training cluster of any size, with planted faults. Loads no torch.

It shares the span contract with the analysis and nothing else, so that what is
found in its runs is evidence: `trainer.simulator.simulation.simulate` makes a
run of a `trainer.simulator.scenario.Scenario`.
"""
