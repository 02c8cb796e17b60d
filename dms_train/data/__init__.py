"""Token files, their manifests, and the batches a rank trains on."""
