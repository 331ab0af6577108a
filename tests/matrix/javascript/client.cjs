// The client of the JavaScript SDK as tests/matrix/remote.py wants it.
// Usage: NODE_PATH=<folder of node_modules> node client.cjs URL TRANSPORT TOKEN
"use strict";

const readline = require("node:readline");
const { ListTasksRequest, SendMessageRequest, StreamResponse, Task } = require("@a2a-js/sdk");
const { ClientFactory, ClientFactoryOptions, JsonRpcTransportFactory, RestTransportFactory } = require("@a2a-js/sdk/client");
const { GrpcTransportFactory } = require("@a2a-js/sdk/client/grpc");

const TRANSPORTS = {
  JSONRPC: () => new JsonRpcTransportFactory(),
  "HTTP+JSON": () => new RestTransportFactory(),
  GRPC: () => new GrpcTransportFactory(),
};

// Shows the token, whatever the transport.
const bearer = (token) => ({
  async before(args) {
    const serviceParameters = { ...args.options?.serviceParameters, Authorization: `Bearer ${token}` };
    args.options = { ...args.options, serviceParameters };
  },
  async after() {},
});

const ofTask = (task) => ({ task: Task.toJSON(task) });

// What a call brings, as the JSON of StreamResponse.
async function* called(client, what, about) {
  switch (what) {
    case "get":
      yield ofTask(await client.getTask({ id: about, tenant: "" }));
      return;
    case "cancel":
      yield ofTask(await client.cancelTask({ id: about, tenant: "" }));
      return;
    case "list": {
      const filter = { ...ListTasksRequest.fromJSON({}), contextId: about };
      for (const task of (await client.listTasks(filter)).tasks) {
        yield ofTask(task);
      }
      return;
    }
    case "send":
      yield ofTask(await client.sendMessage(SendMessageRequest.fromJSON(about)));
      return;
    case "stream":
      for await (const event of client.sendMessageStream(SendMessageRequest.fromJSON(about))) {
        yield StreamResponse.toJSON(event);
      }
      return;
    case "subscribe":
      for await (const event of client.resubscribeTask({ id: about, tenant: "" })) {
        yield StreamResponse.toJSON(event);
      }
      return;
  }
}

const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");

async function answer(client, call) {
  try {
    for await (const event of called(client, call.do, call.with)) {
      say({ id: call.id, event });
    }
    say({ id: call.id, end: true });
  } catch (error) {
    say({ id: call.id, error: String(error) });
  }
}

async function main(url, transport, token) {
  const options = {
    ...ClientFactoryOptions.default,
    transports: [TRANSPORTS[transport]()],
    clientConfig: { interceptors: [bearer(token)] },
  };
  const client = await new ClientFactory(options).createFromUrl(url);
  for await (const line of readline.createInterface({ input: process.stdin })) {
    // Not awaited: several calls may be under way at once.
    void answer(client, JSON.parse(line));
  }
  // The SDK's gRPC client has no way to be closed, and keeps the process alive.
  process.exit(0);
}

main(...process.argv.slice(2));
