"""Costs and properties of a topology: the guarantees of its weights, the speed of agreement, the age of
contributions.
"""
