"""The model: what the particle transformer and the limit share, and the particle transformer.

units      theta, many at once, with weights: the measure nu, and what is asked of any family
           (`layout`: how they are stored; `passes`, `by_autograd`: their field by default)
heads      the family of attention heads, theta = (Q, K, V, O)
attention  their field and its transpose, defined; `eager` computes it with torch, in blocks that
           `budgets` allows and, by `products`, with the same bits on any number of threads
perceptrons  the family of perceptrons; `perceptrons_eager` computes with torch and `activations`
laws       which heads training starts from, and their quadrature; `perceptron_laws` likewise, and
           `entries`, the densities that they share
token_laws  laws of tokens, contexts drawn of them and their quadrature;  sobol: points for both
norm, branch  what a layer adds, of one family or several behind a norm;  blocks: its law
training_problem  what particles and limit know of a problem;  ends: what stands before the first
           layer and behind the last
sight      what tokens see of each other;  tracers: those of weight 0, and their costates;
           company: points among tokens, as tracers
problem    contexts, targets, loss, law;  token_problem: a language model, whose ends (`token_ends`)
           are trained
rules      optimizer rules: pure maps of heads, used by layers and depth nodes alike
layers     forward and backward through the layers, with each layer's update on the way back;
           layers_chosen: compiled or not
particles  the training run of the particle transformer;  run_arguments: what it asks of its
           arguments;  draws: what it starts from;  runs: what it gives;  predictions: of a text;
           flow: where it carries points that are no tokens;  feed: the batches of its steps
work       how long it takes, and so on which device
sharded    the same over several processes
"""
