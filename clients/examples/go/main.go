// Prints the vector of each text as a line of JSON: go run . localhost:50051 "I understand this" "and that"
// With a query, prints texts and scores, the best first: go run . --query "a pet" localhost:50051 "a cat"
//
// ENCSERVE_CA is a PEM file of authorities, and turns on TLS. ENCSERVE_CERT and ENCSERVE_TLS_KEY are the files of a
// client certificate. ENCSERVE_API_KEY is the key.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"flag"
	"log"
	"math"
	"os"
	"time"

	encservev1 "encserve/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

// The library's default limit of replies is 4 MiB; the server's limit is 64 MiB.
const maxResponseBytes = 64 << 20

// security returns plaintext, or TLS with the files from the environment variables.
func security() grpc.DialOption {
	ca := os.Getenv("ENCSERVE_CA")
	if ca == "" {
		return grpc.WithInsecure()
	}
	authorities, err := os.ReadFile(ca)
	if err != nil {
		log.Fatal(err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(authorities) {
		log.Fatal("no certificate in " + ca)
	}
	if cert := os.Getenv("ENCSERVE_CERT"); cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, os.Getenv("ENCSERVE_TLS_KEY"))
		if err != nil {
			log.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config))
}

// floatAt returns the number with this index in an array of little-endian float32.
func floatAt(data []byte, index int) float32 {
	return math.Float32frombits(binary.LittleEndian.Uint32(data[4*index:]))
}

// printVectors prints the vector of each text.
func printVectors(ctx context.Context, client encservev1.EncoderServiceClient, texts []string) error {
	request := &encservev1.EncodeRequest{Options: &encservev1.EncodeOptions{
		Outputs: []*encservev1.OutputSpec{{Kind: encservev1.OutputKind_OUTPUT_KIND_MODEL_POOLING}},
	}}
	for _, text := range texts {
		input := &encservev1.Input{Input: &encservev1.Input_Text{Text: text}}
		request.Inputs = append(request.Inputs, input)
	}
	response, err := client.Encode(ctx, request)
	if err != nil {
		return err
	}
	tensor := response.Outputs[0]
	vector := make([]float32, tensor.Width)
	lines := json.NewEncoder(os.Stdout)
	for i, text := range texts {
		for j := range vector {
			vector[j] = floatAt(tensor.Data, i*len(vector)+j) // one row after another
		}
		if err := lines.Encode(map[string]interface{}{"text": text, "vector": vector}); err != nil {
			return err
		}
	}
	return nil
}

// printScores prints the texts and their scores for a query, the best first.
func printScores(ctx context.Context, client encservev1.EncoderServiceClient, query string, texts []string) error {
	request := &encservev1.ScoreRequest{Query: query, Documents: texts, TopK: uint32(len(texts))}
	response, err := client.Score(ctx, request)
	if err != nil {
		return err
	}
	lines := json.NewEncoder(os.Stdout)
	for i, index := range response.Indices { // with TopK, the scores are sorted, and each has the index of its text
		line := map[string]interface{}{"text": texts[index], "score": floatAt(response.Scores, i)}
		if err := lines.Encode(line); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	query := flag.String("query", "", "print the scores of the texts for this query")
	flag.Parse()
	if flag.NArg() < 2 {
		log.Fatal("usage: encode [--query QUERY] ADDRESS TEXT...")
	}
	texts := flag.Args()[1:]
	limit := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxResponseBytes))
	connection, err := grpc.Dial(flag.Arg(0), security(), limit)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if key := os.Getenv("ENCSERVE_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}

	client := encservev1.NewEncoderServiceClient(connection)
	if *query == "" {
		err = printVectors(ctx, client, texts)
	} else {
		err = printScores(ctx, client, *query, texts)
	}
	if err != nil {
		log.Fatal(err)
	}
}
