"""The wires that agents speak, one file each: `parse` reads a request, `render` writes a reply, `error` a failure."""
