// Prints the vector of each text as a line of JSON: node encode.js localhost:50051 "I understand this" "and that"
// With a query, prints texts and scores, the best first: node encode.js --query "a pet" localhost:50051 "a cat"
// ENCSERVE_CA is a PEM file of authorities, and turns on TLS. ENCSERVE_CERT and ENCSERVE_TLS_KEY are the files of a
// client certificate. ENCSERVE_API_KEY is the key.
"use strict";

const fs = require("fs");
const path = require("path");
const { parseArgs } = require("util");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTO = process.env.ENCSERVE_PROTO || path.join(__dirname, "../../../proto");
const { values, positionals } = parseArgs({ options: { query: { type: "string" } }, allowPositionals: true });
const [address, ...texts] = positionals;
if (!texts.length) {
  console.error("usage: node encode.js [--query QUERY] ADDRESS TEXT...");
  process.exit(2);
}

const definition = protoLoader.loadSync("encserve/v1/encoder.proto", { includeDirs: [PROTO], keepCase: true });
const { EncoderService } = grpc.loadPackageDefinition(definition).encserve.v1;
// The library's default limit of replies is 4 MiB; the server's limit is 64 MiB.
const limits = { "grpc.max_receive_message_length": 64 * 1024 * 1024 };
const read = (name) => (process.env[name] ? fs.readFileSync(process.env[name]) : null);
const security = process.env.ENCSERVE_CA
  ? grpc.credentials.createSsl(read("ENCSERVE_CA"), read("ENCSERVE_TLS_KEY"), read("ENCSERVE_CERT"))
  : grpc.credentials.createInsecure();
const client = new EncoderService(address, security, limits);
const metadata = new grpc.Metadata();
if (process.env.ENCSERVE_API_KEY) metadata.set("authorization", `Bearer ${process.env.ENCSERVE_API_KEY}`);

function printVectors(response) {
  const [{ data, width }] = response.outputs; // little-endian float32, one row after another
  texts.forEach((text, i) => {
    const vector = Array.from({ length: width }, (_, j) => data.readFloatLE(4 * (i * width + j)));
    console.log(JSON.stringify({ text, vector }));
  });
}

function printScores(response) {
  // With top_k, the scores are sorted, and `indices` has the index of each text. The scores are little-endian float32.
  response.indices.forEach((index, i) => {
    console.log(JSON.stringify({ text: texts[index], score: response.scores.readFloatLE(4 * i) }));
  });
}

function call(method, request, print) {
  client[method](request, metadata, { deadline: Date.now() + 30000 }, (error, response) => {
    if (error) {
      console.error(`${grpc.status[error.code]}: ${error.details}`);
      process.exitCode = 1;
    } else {
      print(response);
    }
    client.close();
  });
}

if (values.query !== undefined) {
  call("Score", { query: values.query, documents: texts, top_k: texts.length }, printScores);
} else {
  const options = { outputs: [{ kind: "OUTPUT_KIND_MODEL_POOLING" }] };
  call("Encode", { inputs: texts.map((text) => ({ text })), options }, printVectors);
}
