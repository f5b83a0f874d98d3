"""The store process: tiers of KV pages below the device's memory."""
