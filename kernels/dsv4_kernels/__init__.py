"""GPU and CPU kernels of the DeepSeek V4 models: tensors in, tensors out, nothing of the cluster."""
