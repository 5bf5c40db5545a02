"""`python -m agents.fork_server`: started by the agent."""

from agents.fork_server.main import main

if __name__ == "__main__":
    main()
