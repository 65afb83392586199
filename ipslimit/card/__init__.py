"""The fused path on a CUDA card, in Triton: heads, their transpose, of small ones whole steps.

To be read in this order, in which each is made of those before it:

    sizes           which work it takes, and how that is cut; imports no Triton
    one_block       a block of heads on one context: the field
    pull_back       its transpose
    on_tensors      one program a context and block of heads: the flat interface of `model.eager`
    through_layers  a program takes a seed's context through all layers, forward and back
    steps           a rule's formula, which is written for tensors, as one launch for all layers
    swept_layers    these as the `Layers` of a particle transformer: three launches a step
    through_depth   the same through the limit's depth: a march's steps are data
    tiles           of larger heads, attention alone: on tiles of pairs of tokens
    on_tiles        the rest of them by torch's products: the same interface as `on_tensors`

IPSLIMIT_KERNEL=triton asks for it; `cpu.dispatch` then takes it for attention heads, in any
numbers: by lanes with d and m up to 16, otherwise by tiles with m up to 64. Layers that are of one
family of small heads, without a norm, not tied and in one process go in whole sweeps, as long as
the gradients of every context of one seed are within a budget. So does the limit's march, up to 128
heads. All else that is asked for goes layer by layer, with these kernels, or in torch (perceptrons,
heads larger still). Rules without a formula make their step in torch.

None of this is a second definition. The kernels are those of `model.eager`, to which tests/card
holds them in Triton's interpreter (TRITON_INTERPRET=1, set before Triton is imported, on CPU
tensors). They are compiled for a card, without one, by benchmarks/card_registers.py; none has run
them.
"""
