"""From a trained model to a bundle: export, calibrate, quantize, gate, golden set, report."""
