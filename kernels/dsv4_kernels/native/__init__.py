"""CPU kernels in C: compiled on first use with the system's compiler, absent where that or the processor is missing."""
