"""What serves any torch model, by three faces: ipslimit.optim, ipslimit.nn, ipslimit.BoundaryProbe.

All of it rests on two views of a model. To read it, take the files in this order.

A model is made of affine maps z = W x + b, each with the mean mu of its inputs:

    wrappers       names and modules as if torch.compile had wrapped none
    maps           AffineMap; g_W - g_b mu^T and W mu; which maps a model has
    rows           sums of the rows that enter, without the padding
    tap            a hook whose sums arrive with the gradients (the hardest file, with a page ahead)
    inputs         InputMeans: the means of a step, over accumulated passes and processes
    param_groups   param groups that name modules
    adam           AdamW's step of parameters, and of weights at a fixed mean output
    sbo            SBOAdamW: weight updates that do not move the boundary b + W mu
    centred        CenteredLinear: z = S (x - c) + beta;    conversion: whole models there and back
    recentring     when its centres move
    stack, probe   BoundaryProbe: how much of a training step moves the boundaries

A model has pairs of matrices (A, B) of which its function sees only the product, so that c A and
B / c do as well:

    pairs          Part, Side, Pair
    projections    pairs out of the parameters of attention and of MLPs
    activations    which functions let a scale through
    sites          what kinds of modules have pairs
    pair_search    find_pairs by these;    pair_check: verify_pairs on example inputs
    exponents      how an optimizer's state scales with its parameter, and where it cannot
    followers      who keeps means of inputs, and is told of a rescaling
    rescale        rescale_pair, balance: parameters, gradients and state together
    saggs          SAGGS: any optimizer, with its pairs balanced every few steps

arguments has the checks that they share.
"""
