"""The fast path on the CPU: the field, its transpose, layers and rules as compiled loops.

To be read in this order, in which each is made of those before it:

    cost        eight units are computed at a time; what a field costs, hence which path is taken
    lanes       a vector of eight numbers, one of each of eight units, and what is done with it
    powers      2^t of such vectors
    registers   how many of them the processor holds, which decides how products are cut
    tiles       products of small matrices of such vectors, in registers
    sight       what tokens see of each other, at its addresses
    rows        the attention of some rows of tokens, and its transpose
    scratch     where everything lies in the memory that the loops on heads work in
    blocks      the field of eight heads on one context, and its transpose
    attention   all heads and contexts of a seed: the compiled kernel of this family of units
    functions   activations of such vectors
    panels      products of many tokens with a small matrix, written out
    wide        few units as the neurons of one wide layer: products of many tokens with all of them
    perceptrons the compiled kernel of the other family
    wide_attention, wide_perceptrons
                the kernels of the two families for few units on many tokens
    kernels     a family's kernel by its address, as all that follows knows it, one for a dtype
    kernel      groups of contexts and of units, and seeds: the loops that call kernels
    fused       the same on tensors: how work is cut into tasks that threads share
    branches    what a layer adds: the fields of its families behind a norm, and its transpose
    formulas    a rule's formula, which is written for tensors, for one entry after another
    places      where a family's matrices and biases are, as rules need it
    rules       one step of an optimizer rule on every unit of a layer
    rule_loops  what of them takes loops
    nodes       a rule's step on the units of many depths, for the limit
    sweeps      a seed through all layers, forward, and backward with the rule
    layers      these sweeps as the `Layers` of a particle transformer
    weights     by itself: SBO-AdamW, and what a probe measures, on large weights of torch models

`dispatch` stands before them all: it chooses the path, and which of a family's two kernels, by
sizes alone, and imports no compiler. The rest is imported where it is first used, since that takes
a second. From outside, tensors come in through `fused` and `layers`, arrays through `weights`;
compiled loops elsewhere, such as the march of the limit through depth, call `branch_field` and
`branch_vjp` of `branches`. All that enters compiled code from Python is a
`compilation.compiled_entry`, and what it calls by address, a kernel or a rule's step, a
`compilation.compiled_callback`: both are kept on disk. All else is a `compilation.inner_loop`,
which becomes part of these and is compiled with them. So a family or a rule costs the compilation
of itself alone, and no loop is compiled twice for another.

None of this is a second definition. The field and its transpose are those of `model.eager`, to
which, and to autograd through the formula, tests/test_kernel_fused.py holds them, those for few
units tests/test_wide_kernels.py, and those of tokens with weights tests/test_weighted_kernels.py.
Layers and rules are those of `model.layers` and `model.rules`, and tests/test_layers.py compares
them, as it does the march with the one in torch. They agree to rounding; where bits must be the
same, whatever the threads and the seeds computed together, bits are compared.
"""
