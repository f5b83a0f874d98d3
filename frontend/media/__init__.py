"""Images in requests: found in their parts, and made into items by the media process."""
