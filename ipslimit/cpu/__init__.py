"""The fast path on the CPU: the same field, transpose, layers and rules as compiled loops.

In the order in which they build on each other:

    lanes     a vector of eight numbers, one of each of eight heads, and what is done with it
    tiles     products of small matrices of such vectors
    blocks    the field of eight heads on one context, and its transpose
    kernel    all heads, all contexts
    formulas  a rule's formula, which is written for tensors, for one entry after another
    rules     one step of an optimizer rule on every head of a layer;  rule_loops: what takes loops
    sweeps    a seed through all layers, forward, and backward with the rule
    fused     how tensors come in and threads share the work;  layers: the same for whole sweeps
    dispatch  which path computes a field: this one, or the eager one of `model`
"""
