"""How policies run on a device: plainly, by kernels, by CUDA graphs, by NumPy. Nothing below imports this folder."""
