"""New weights in the engines of a run, with labels that are right at every moment, and the proof that they are there.

    freeze ─► load ─► label ─► resume ─► probe

base            WeightTransport: how weights get into engines of one kind, a plug-in; errors
updater         WeightUpdater: these steps, for trainers that load weights themselves; WeightSender: with a transport
probe           what engines sample, against what the trainer's model says of it
files           weights as files on the same machine, and the kinds of engines that read them
merged_weights  a model's tensors under their Hugging Face names, adapters merged in
publisher       ModelWeightPublisher: the weights of a model in this process, all of it put together

From the first load on, weights and labels may disagree, so whatever fails from then on leaves generation standing
still. Trainers and bridges use this package; it imports neither.
"""
