"""The Dash pages: finished results in, figures out."""
