"""How full the KV memory is, by way of managing it: simulated on the host with the real scheduler, for a report."""
