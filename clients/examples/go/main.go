// Prints the vector of each text as a line of JSON: go run . localhost:50051 "I understand this" "and that"
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

func main() {
	if len(os.Args) < 3 {
		log.Fatal("usage: encode ADDRESS TEXT...")
	}
	texts := os.Args[2:]
	limit := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxResponseBytes))
	connection, err := grpc.Dial(os.Args[1], security(), limit)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if key := os.Getenv("ENCSERVE_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}

	request := &encservev1.EncodeRequest{Options: &encservev1.EncodeOptions{
		Outputs: []*encservev1.OutputSpec{{Kind: encservev1.OutputKind_OUTPUT_KIND_MODEL_POOLING}},
	}}
	for _, text := range texts {
		input := &encservev1.Input{Input: &encservev1.Input_Text{Text: text}}
		request.Inputs = append(request.Inputs, input)
	}
	response, err := encservev1.NewEncoderServiceClient(connection).Encode(ctx, request)
	if err != nil {
		log.Fatal(err)
	}
	tensor := response.Outputs[0]
	vector := make([]float32, tensor.Width)
	lines := json.NewEncoder(os.Stdout)
	for i, text := range texts {
		row := tensor.Data[4*i*len(vector):] // little-endian float32, one row after another
		for j := range vector {
			vector[j] = math.Float32frombits(binary.LittleEndian.Uint32(row[4*j:]))
		}
		if err := lines.Encode(map[string]interface{}{"text": text, "vector": vector}); err != nil {
			log.Fatal(err)
		}
	}
}
