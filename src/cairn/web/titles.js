/** Return an agent's title, or its id if it has none. */
export const titleOf = (agent) => agent.metadata?.title || agent.id;
