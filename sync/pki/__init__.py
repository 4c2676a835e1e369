"""Who may talk to the sync service and the broker: an own CA, certificates of devices, what is revoked."""
