"""Float32 products inside kernels: functions that are called by their address."""
