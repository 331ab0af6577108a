// Sends messages to an agent in one conversation and prints the answers as they stream.
//   node client.mjs http://127.0.0.1:8000 "First message" "Second message"
// A2A_TOKEN in the environment is sent as the bearer token.
import { randomUUID } from "node:crypto";
import { SendMessageRequest, StreamResponse } from "@a2a-js/sdk";
import { ClientFactory, ClientFactoryOptions, JsonRpcTransportFactory } from "@a2a-js/sdk/client";

const bearer = (token) => ({
  async before(args) {
    const serviceParameters = { ...args.options?.serviceParameters, Authorization: `Bearer ${token}` };
    args.options = { ...args.options, serviceParameters };
  },
  async after() {},
});

const textOf = (parts) => (parts ?? []).map((part) => part.text ?? "").join("");

async function ask(client, text, contextId) {
  // Every update is printed once.
  const metadata = { "urn:codex-workspace:answer-updates": "pieces" };
  const message = { messageId: randomUUID(), role: "ROLE_USER", contextId, parts: [{ text }], metadata };
  for await (const event of client.sendMessageStream(SendMessageRequest.fromJSON({ message }))) {
    const { artifactUpdate, statusUpdate } = StreamResponse.toJSON(event);
    if (artifactUpdate?.artifact.artifactId === "answer") {
      process.stdout.write(textOf(artifactUpdate.artifact.parts));
    } else if (statusUpdate) {
      const state = statusUpdate.status.state.replace("TASK_STATE_", "").toLowerCase();
      console.log(`\n[${state}] ${textOf(statusUpdate.status.message?.parts)}`.trimEnd());
    }
  }
}

const [url, ...texts] = process.argv.slice(2);
const token = process.env.A2A_TOKEN;
const client = await new ClientFactory({
  ...ClientFactoryOptions.default,
  transports: [new JsonRpcTransportFactory()],
  clientConfig: { interceptors: token ? [bearer(token)] : [] },
}).createFromUrl(url);
const contextId = randomUUID();
for (const text of texts) {
  await ask(client, text, contextId);
}
