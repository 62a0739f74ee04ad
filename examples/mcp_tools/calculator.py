"""An MCP server with a calculator, over standard input and output: `python examples/mcp_tools/calculator.py`."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool(structured_output=False)
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool(structured_output=False)
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


if __name__ == "__main__":
    server.run()
