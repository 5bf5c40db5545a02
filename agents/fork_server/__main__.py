"""`python -m unicrond.agents.fork_server`: started by the agent."""

from unicrond.agents.fork_server.main import main

if __name__ == "__main__":
    main()
