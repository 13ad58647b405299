/** What an agent is called: the title that a chat gave it, or its id. */
export const titleOf = (agent) => agent.metadata?.title || agent.id;
