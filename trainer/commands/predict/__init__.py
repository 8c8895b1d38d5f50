"""The command `predict`: label images in order with a trained model on all devices.

Nothing in this package trains.
"""
