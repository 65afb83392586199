"""The fused path on a CUDA card, in Triton: small heads, their transpose, whole training steps.

To be read in this order, in which each is made of those before it:

    sizes           which work it takes, and how that is cut; imports no Triton
    one_block       a block of heads on one context: the field
    pull_back       its transpose
    on_tensors      one program a context and block of heads: the flat interface of `model.eager`
    through_layers  a program takes a seed's context through all layers, forward and back
    steps           a rule's formula, which is written for tensors, as one launch for all layers
    swept_layers    these as the `Layers` of a particle transformer: three launches a step

IPSLIMIT_KERNEL=triton asks for it; `cpu.dispatch` then takes it for attention heads with d and m up
to 16, in any numbers. Layers that are of one such family, without a norm, not tied and in one
process go in whole sweeps, as long as the gradients of every context of one seed are within a
budget. All else that is asked for goes layer by layer, with these kernels (the limit's march too),
or in torch (perceptrons, larger heads). Rules without a formula make their step in torch.

None of this is a second definition. The kernels are those of `model.eager`, to which tests/card
holds them in Triton's interpreter (TRITON_INTERPRET=1, set before Triton is imported, on CPU
tensors). They are compiled for a card, without one, by benchmarks/card_registers.py; none has run
them.
"""
