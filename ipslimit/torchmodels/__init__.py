"""What serves any torch model, by three faces: ipslimit.optim, ipslimit.nn, ipslimit.BoundaryProbe.

All of it rests on two views of a model. To read it, take the files in this order.

A model is made of affine maps z = W x + b, each with the mean mu of its inputs:

    wrappers       names and modules as if torch.compile had wrapped none
    bare           a copy of a module that can be tried alone
    affine         which modules compute x W^T + b or x W + b, whatever their class
    maps           AffineMap; g_W - g_b mu^T and W mu; which maps a model has
    rows           sums of the rows that enter, without the padding
    tap            a hook whose sums arrive with the gradients (the hardest file, with a page ahead)
    inputs         InputMeans: the means of a step, over accumulated passes and processes
    param_groups   param groups that name modules
    adam           AdamW's step of parameters, and of weights at a fixed mean output
    sbo            SBOAdamW: weight updates that do not move the boundary b + W mu
    states         the state dicts that it loads
    centred        CenteredLinear: z = S (x - c) + beta;    conversion: whole models there and back
    recentring     when its centres move
    stack, probe   BoundaryProbe: how much of a training step moves the boundaries

A model has pairs of matrices (A, B) of which its function sees only the product, so that c A and
B / c do as well:

    pairs          Part, Side, Pair
    projections    pairs out of the parameters of attention and of MLPs
    activations    which functions let a scale through
    trials         whether a rescaling changes what a module computes, by calling it alone
    proposals      pairs that a module may have, to be accepted or tried
    attention_sites, mlp_sites      how public models call the parts of these: the tables
    sites          torch's own modules, and all recognisers
    pair_search    find_pairs by these;    pair_check: verify_pairs on example inputs
    exponents      how an optimizer's state scales with its parameter, and where it cannot
    followers      who keeps means of inputs, and is told of a rescaling
    rescale        rescale_pair, balance: parameters, gradients and state together
    saggs          SAGGS: any optimizer, with its pairs balanced every few steps
    gauge_plan     what a step is scaled by, out of the norms of matrices that pairs connect
    gauge          GaugeAdamW: AdamW with steps that are the same in every gauge

averages has what lets an average of a model follow moved centres and rescaled pairs; joining, what
a process without any more batches does. arguments has the checks that all share; shards, what FSDP2
leaves of a parameter on a process; rehearsal, the step that torch.distributed.checkpoint takes and
that must be none; eagerly keeps torch.compile off steps.
"""
